//! Certificates, signing requests, join tokens, and files of identities. Any bytes are refused, or give
//! values that are written and read again as the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use shorthorn_pki::{
    Bundle, Certificate, JoinToken, CertificateRequest, Trust, chain_from_pem, chain_to_pem, request_to_pem,
};

fuzz_target!(|data: &[u8]| {
    let _ = Certificate::from_der(data);
    let requests = [CertificateRequest::from_der(data), CertificateRequest::from_pem(data)];
    for request in requests.into_iter().flatten() {
        assert!(!request.public().is_empty());
        let _ = request.check_names(request.common_name());
    }
    let in_pem = CertificateRequest::from_pem(request_to_pem(data).as_bytes());
    assert_eq!(in_pem.is_ok(), CertificateRequest::from_der(data).is_ok());
    if let Ok(bundle) = Bundle::from_pem(data) {
        bundle.check().expect("a checked bundle");
        let written = bundle.to_pem().expect("a bundle that was read");
        let again = Bundle::from_pem(written.as_bytes()).expect("a written bundle");
        assert_eq!(again.trust, bundle.trust);
        assert_eq!(again.identity.is_some(), bundle.identity.is_some());
    }
    if let Ok(trust) = serde_json::from_slice::<Trust>(data) {
        let written = serde_json::to_vec(&trust).expect("a list that was read");
        assert_eq!(serde_json::from_slice::<Trust>(&written).expect("a written list"), trust);
    }
    if let Ok(chain) = chain_from_pem(data) {
        assert_eq!(chain_from_pem(chain_to_pem(&chain).as_bytes()).expect("a written chain"), chain);
    }
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(token) = text.parse::<JoinToken>() {
        assert_eq!(token.reveal(), text);
    }
});
